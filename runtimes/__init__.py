"""The runtimes: everything that really executes an action. Never imports the core, the scheduler or the managers."""

"""Steps of RL tasks, of which a trainer has told: how far each is, and when it is expected to end."""

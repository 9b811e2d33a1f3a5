"""SWE-ReX's runtime server: bash sessions, commands and files of one trajectory, for its clients as they are."""

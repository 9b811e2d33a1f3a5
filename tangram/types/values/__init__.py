"""Values that many messages hold: quantities of memory and time, numbers of JSON, waits between tries."""

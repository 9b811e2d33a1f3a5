"""The thinking: what runs, where and with how much. Standard library and numpy only."""

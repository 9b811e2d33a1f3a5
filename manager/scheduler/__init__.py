"""How many units each action gets, and when: policies over read-only views. Never says cpu or gpu."""

"""Other machines: who may join, who serves, what runs where, and what becomes of it when one is gone."""

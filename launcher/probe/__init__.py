"""How reports of one or many hosts are asked for and drawn."""

"""ZeRO: units of parameters, and which of their parts live on which rank."""

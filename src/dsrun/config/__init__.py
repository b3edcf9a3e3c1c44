"""The training config: schema, loading, batch arithmetic. No torch, no process group."""

"""deepspeed.runtime.sequence_parallel.ulysses_sp: long sequences, a shard at a time."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.runtime.deepspeed.layers": ["TiledMLP", "UlyssesSPAttentionHF"]})

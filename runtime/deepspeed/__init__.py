"""DeepSpeed's classes and functions beside the engine, for scripts that import them. Nothing else in dsrun needs them.

What scripts call on the engine is in `runtime/engine/deepspeed`; where each name stands below `deepspeed` is in
`src/dsrun/as_deepspeed/site`.
"""

"""Pipeline parallelism: a model's layers in stages, one or more chunks of them on a rank."""

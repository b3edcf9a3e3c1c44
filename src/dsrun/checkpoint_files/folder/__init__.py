"""The folder of a run's checkpoints: tags, the latest one, jobs that save there, removal."""

"""One module per part of the schema. `training.Training` is the whole config."""

"""What is shown of configs and of the schema."""

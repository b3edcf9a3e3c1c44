"""Where plans come from: a config's rules, a Hugging Face model's own plan, rules of known models, names of layers."""

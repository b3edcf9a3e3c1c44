"""Parts of cutting a plain model into chunks; `cut.py` puts them together."""

"""Options and types of click that several verbs share."""

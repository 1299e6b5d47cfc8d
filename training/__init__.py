"""The recipe that makes models/nano: from package names to a model folder. See README.md."""

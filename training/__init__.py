"""A training run besides its steps: the records, views and logs."""

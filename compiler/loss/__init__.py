"""The loss of a step: its terms, and what the whole batch counts for each of them."""

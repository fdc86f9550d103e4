"""One server over several ranks: what the ranks say to each other, and what each holds."""

"""What a block consists of, and how blocks and heads of two engines lie over each other. Pure."""

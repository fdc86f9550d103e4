"""What every server shares: errors, channels, scaffolding, deadlines, stages, metrics, logging,
configuration."""

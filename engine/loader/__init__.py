"""Reading model folders: checkpoints, fused weights, fingerprint."""

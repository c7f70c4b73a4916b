"""Faster, never different. `stack` trains many clients as one computation; the other modules serve it."""

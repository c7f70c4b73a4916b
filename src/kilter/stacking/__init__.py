"""Many clients trained as one computation: `stack` composes and trains, `layers` computes, `chance` draws."""

"""Building blocks of methods: density models, subjective logic, secret sharing, posteriors, clustering."""

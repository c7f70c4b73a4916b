"""What methods are made of: density models, subjective logic, secret sharing, posteriors, clustering. No method, no runtime."""

"""What a person looks at: progress, results, figures."""

"""Training runs whose processes are killed at random moments, until they have ended: see
`chains`."""

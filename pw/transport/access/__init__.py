"""Who may connect: certificates, credentials, identities, and peers of the same user."""

"""Who a client is: API keys, JWTs, and the authenticator that asks them. The audit log of what admins do."""

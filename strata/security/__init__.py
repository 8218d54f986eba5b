"""Who somebody is, as files say it: certificates, tokens, and why a handshake failed."""

"""The coordinator's port: TLS with ALPN in front of HTTP, feeds and the relay."""

"""What stands between Ray and the gateway, without Ray."""

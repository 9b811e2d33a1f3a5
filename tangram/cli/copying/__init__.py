"""What ``tangram cp`` copies: a tree of this machine as archives, and an archive as a tree."""

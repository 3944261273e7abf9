"""What runs on a host: it is sent there, and needs nothing but Python 3.11 and its standard library."""

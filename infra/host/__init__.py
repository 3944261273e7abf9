"""The code that runs on a host. It is sent there, and needs nothing but Python 3.11 and its standard library."""

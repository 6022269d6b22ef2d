"""`python -m sglcache.server FD`: a rank, for the supervisor at the other end of FD, which alone starts it so."""

import sys

from sglcache.server.rank import serve

if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))

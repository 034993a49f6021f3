"""`python -m startrail_jax.verify`."""

import sys

from startrail_jax.verify.command import main

if __name__ == "__main__":
    sys.exit(main())

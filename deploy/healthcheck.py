"""Whether the daemon in a container serves: the image's HEALTHCHECK.

Asks its admin port, PS_ADMIN_LISTEN. A container without one, as of a worker, is
healthy as long as it runs.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

listen = os.environ.get("PS_ADMIN_LISTEN", "off")
if listen == "off":
    sys.exit()
scheme, context = "http", None
if "PS_TLS_CERT" in os.environ:
    # Of this container alone: what else it proves, its callers check.
    scheme, context = "https", ssl._create_unverified_context()
try:
    port = listen.rpartition(":")[2]
    url = f"{scheme}://127.0.0.1:{port}/readyz"
    urllib.request.urlopen(url, timeout=4, context=context).close()
except urllib.error.HTTPError as error:
    sys.exit(f"not ready: {error.read().decode().strip()}")
except OSError as error:
    sys.exit(f"no answer at {url}: {error}")

"""A process that looks like an engine from outside: serves /health on --port, has a child, ends as it is told.

python fake_engine.py [--delay S] [--die S] [--say TEXT] --port P
"""

import argparse
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--die", type=float)
    parser.add_argument("--say", default="")
    args = parser.parse_args()
    print(args.say, flush=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    if args.die is not None and args.die <= 0:
        sys.exit(3)
    time.sleep(args.delay)
    server = HTTPServer(("127.0.0.1", args.port), Handler)
    if args.die is not None:
        threading.Timer(args.die, server.shutdown).start()
    server.serve_forever()
    sys.exit(3)


if __name__ == "__main__":
    main()

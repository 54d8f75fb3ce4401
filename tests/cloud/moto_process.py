"""A program: moto's mock of S3, on a socket that listens already and has been handed down."""

import sys
from importlib import import_module

if __name__ == "__main__":
    app = import_module("moto.moto_server.werkzeug_app")
    served = app.DomainDispatcherApplication(app.create_backend_app)
    serving = import_module("werkzeug.serving")
    serving.make_server("127.0.0.1", 0, served, threaded=True, fd=int(sys.argv[1])).serve_forever()

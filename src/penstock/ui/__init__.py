"""`penstock ui`: a run as one page in the browser. Read-only, for this machine alone.

`page_server` decides who may ask, and answers; `run_reader` reads a run bit by bit, `page_data` trees and
their differences, `layer_norms` what values tell of layers. `page/` is the page: plain HTML, CSS and
JavaScript, with nothing from elsewhere on the net.
"""

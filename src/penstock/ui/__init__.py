"""`penstock ui`: a run as one page in the browser. Read-only, for this machine alone.

`request_guard` decides who may ask, `page_data` makes the answers, `page_server` puts both together, and
`page/` is the page: plain HTML, CSS and JavaScript, with nothing from elsewhere on the net.
"""

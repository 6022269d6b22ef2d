"""L3 below the host tier: one small interface (store.py), `file`, the embedded default, and `mooncake`.

How pages are named and checked: page.py. Where their bytes lie: host.py.
"""

"""WHAT A PAGE SHOWS: results, comparisons, saved traces and certificates as one page of HTML."""

"""THE CONTENTS OF A PAGE: results, comparisons, saved traces and certificates as one HTML page."""

"""Pages of HTML in one file: elements, charts, heat maps and the script that moves them; knows no FFN."""

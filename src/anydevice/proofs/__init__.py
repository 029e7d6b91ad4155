"""Properties that hold for every input of a set, with certificates that anybody can check again."""

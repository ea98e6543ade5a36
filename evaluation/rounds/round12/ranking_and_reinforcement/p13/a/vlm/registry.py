class Registry(dict):
    def add(self, name):
        def wrap(obj):
            self[name] = obj
            return obj

        return wrap

    def make(self, spec, **extra):
        spec = dict(spec)
        return self[spec.pop("type")](**spec, **extra)


DATASETS, MODELS, HOOKS = Registry(), Registry(), Registry()

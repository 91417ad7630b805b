{{/* Combinations that cannot work, each refused with a sentence that names both values. */}}
{{- define "whalepod.validate" -}}
{{- if and (not .Values.redis.enabled) (not .Values.redis.external.url) (not .Values.redis.external.existingSecret) -}}
{{- fail "redis.enabled is false and redis.external names no server: set redis.external.url or redis.external.existingSecret" -}}
{{- end -}}
{{- if and .Values.redis.external.url .Values.redis.external.existingSecret -}}
{{- fail "redis.external.url and redis.external.existingSecret are both set: keep one" -}}
{{- end -}}
{{- range $url := prepend .Values.redis.external.kvUrls .Values.redis.external.url -}}
{{- if contains "@" $url -}}
{{- fail "redis.external.url or kvUrls holds a password, which would be shown in a ConfigMap: put the URLs into a Secret, and set redis.external.existingSecret" -}}
{{- end -}}
{{- if and $url (not (regexMatch "^redis://[^/:]" $url)) -}}
{{- fail (printf "redis.external.url or kvUrls has %s: write redis://host:port/0 (there is no TLS to the store)" $url) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.enabled (dig "kv" "cluster" false .Values.settings) -}}
{{- fail "settings.kv.cluster is true, but the servers of redis.enabled are no Redis Cluster: use redis.external" -}}
{{- end -}}
{{- if and .Values.router.tls.clientCaKey (not .Values.router.tls.existingSecret) -}}
{{- fail "router.tls.clientCaKey is set without router.tls.existingSecret" -}}
{{- end -}}
{{- if and .Values.peerTls.existingSecret (not .Values.peerTls.name) -}}
{{- fail "peerTls.existingSecret is set without peerTls.name: pods are reached by address, so say which name the certificate holds" -}}
{{- end -}}
{{- if and .Values.router.ingress.enabled .Values.router.tls.existingSecret -}}
{{- fail "router.ingress.enabled and router.tls.existingSecret are both set: an Ingress ends TLS itself (router.ingress.tlsSecret)" -}}
{{- end -}}
{{- range $pool := list "prefill" "decode" "vision" -}}
{{- $values := index $.Values $pool -}}
{{- $gpu := eq (dig "engine" "device" "cpu" $.Values.settings) "cuda" -}}
{{- if and $values.gpus (not $gpu) -}}
{{- fail (printf "%s.gpus is set, but settings.engine.device is not cuda" $pool) -}}
{{- end -}}
{{- if and $gpu (not $values.gpus) $values.replicas -}}
{{- fail (printf "settings.engine.device is cuda, but %s.gpus is 0" $pool) -}}
{{- end -}}
{{- if and $values.autoscaling.enabled $.Values.ray.enabled -}}
{{- fail (printf "%s.autoscaling.enabled and ray.enabled are both set: Ray's pools have a fixed size" $pool) -}}
{{- end -}}
{{- if and $values.autoscaling.enabled (not $values.replicas) -}}
{{- fail (printf "%s.autoscaling.enabled is set, but %s.replicas is 0: the others are told that there is no such pool" $pool $pool) -}}
{{- end -}}
{{- $shared := dig $pool "expert_parallel" false $.Values.settings -}}
{{- if and (include "whalepod.computesTogether" (dict "root" $ "pool" $pool)) (not $shared) -}}
{{- if $values.autoscaling.enabled -}}
{{- fail (printf "%s.autoscaling.enabled and settings.%s.context_parallel are both set: a pool that divides prompts has a fixed size" $pool $pool) -}}
{{- end -}}
{{- if $.Values.ray.enabled -}}
{{- fail (printf "settings.%s.context_parallel and ray.enabled are both set: Ray's pods have no names by which ranks could find each other" $pool) -}}
{{- end -}}
{{- end -}}
{{- if and $values.autoscaling.enabled $shared -}}
{{- fail (printf "%s.autoscaling.enabled and settings.%s.expert_parallel are both set: a pool that shares its experts has a fixed size" $pool $pool) -}}
{{- end -}}
{{- if and $shared $.Values.ray.enabled (gt (int $values.replicas) 1) -}}
{{- fail (printf "settings.%s.expert_parallel and ray.enabled are both set: Ray's pods have no names by which ranks could find each other" $pool) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.vision.autoscaling.enabled (eq .Values.autoscaling.kind "hpa") -}}
{{- fail "vision.autoscaling.enabled needs autoscaling.kind keda: vision ranks have no gauge that an HPA could read" -}}
{{- end -}}
{{- end -}}

{{/* cluster.yaml of every process: `settings`, and over them what this chart decides. */}}
{{- define "whalepod.config" -}}
{{- $ := . -}}
{{- $full := include "whalepod.fullname" . -}}
{{- $own := dict
  "model" .Values.model.path
  "secret_file" (printf "/etc/whalepod/secret/%s" .Values.clusterSecret.key)
  "host" .Values.listenHost
  "ranks_apart" true
  "router" (dict
    "http_port" (int .Values.router.ports.http)
    "grpc_port" (int .Values.router.ports.grpc)
    "admin_port" (int .Values.router.ports.admin)
    "processes" (int .Values.router.processes)
    "drain_seconds" (int .Values.drainSeconds))
  "kv" (dict "port" (int .Values.kv.port))
-}}
{{- with .Values.model.servedName -}}
{{- $_ := set $own "served_model_name" . -}}
{{- end -}}
{{- range $pool := list "prefill" "decode" "vision" -}}
{{- $values := index $.Values $pool -}}
{{- $replicas := int $values.replicas -}}
{{- /* Only ranks that compute together, and Ray, must know how many there are. Others would start anew when a pool grows. */ -}}
{{- if not (or $.Values.ray.enabled (include "whalepod.computesTogether" (dict "root" $ "pool" $pool))) -}}
{{- $replicas = min $replicas 1 -}}
{{- end -}}
{{- $_ := set $own $pool (dict "replicas" $replicas "port" (int $values.port) "gpus" (int $values.gpus)) -}}
{{- end -}}
{{- if .Values.ray.enabled -}}
{{- $_ := set $own "ray" (dict "pool_resources" true) -}}
{{- else -}}
{{- $_ := set $own "rank_host" (printf "%s-{pool}-{index}.%s-{pool}.%s.svc.%s" $full $full .Release.Namespace .Values.clusterDomain) -}}
{{- end -}}
{{- if .Values.router.apiKeys.existingSecret -}}
{{- $_ := set $own.router "api_keys_file" (printf "/etc/whalepod/api-keys/%s" .Values.router.apiKeys.key) -}}
{{- end -}}
{{- $tls := dict -}}
{{- with .Values.peerTls -}}
{{- if .existingSecret -}}
{{- $tls = dict
  "peer_cert_file" (printf "/etc/whalepod/peer-tls/%s" .certKey)
  "peer_key_file" (printf "/etc/whalepod/peer-tls/%s" .privateKeyKey)
  "peer_ca_file" (printf "/etc/whalepod/peer-tls/%s" .caKey)
  "peer_name" .name
-}}
{{- end -}}
{{- end -}}
{{- if .Values.router.tls.existingSecret -}}
{{- $_ := set $tls "cert_file" (printf "/etc/whalepod/tls/%s" .Values.router.tls.certKey) -}}
{{- $_ := set $tls "key_file" (printf "/etc/whalepod/tls/%s" .Values.router.tls.privateKeyKey) -}}
{{- with .Values.router.tls.clientCaKey -}}
{{- $_ := set $tls "client_ca_file" (printf "/etc/whalepod/tls/%s" .) -}}
{{- end -}}
{{- end -}}
{{- if $tls -}}
{{- $_ := set $own "tls" $tls -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (not .Values.redis.external.existingSecret) -}}
{{- $_ := set $own "redis_url" .Values.redis.external.url -}}
{{- with .Values.redis.external.kvUrls -}}
{{- $_ := set $own.kv "urls" . -}}
{{- end -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite (dict "log_json" true) (deepCopy .Values.settings) $own) -}}
{{- end -}}

{{/* (dict "root" $ "roles" (list …)): peers that are pods of this release with one of these roles. */}}
{{- define "whalepod.peers" -}}
- podSelector:
    matchLabels:
      {{- include "whalepod.releaseLabels" .root | nindent 6 }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " .roles }}]}
{{- end -}}

{{- define "whalepod.monitoringPeers" -}}
{{- if .Values.networkPolicy.monitoringFrom -}}
{{- toYaml .Values.networkPolicy.monitoringFrom -}}
{{- else -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ .Values.networkPolicy.monitoringNamespace }}
{{- end -}}
{{- end -}}

{{/* Those in the URLs, where this chart sees them. */}}
{{- define "whalepod.externalRedisPorts" -}}
{{- $ports := list -}}
{{- with .Values.redis.external -}}
{{- if .existingSecret -}}
{{- $ports = append $ports .port -}}
{{- else -}}
{{- range $url := prepend .kvUrls .url -}}
{{- $ports = append $ports (regexFind "[0-9]+$" (regexFind ":[0-9]+$" (urlParse $url).host) | default "6379" | int) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $ports | uniq }}
- port: {{ . }}
{{- end }}
{{- end -}}

{{/* Name lookups, this release, and a store or collector outside it. */}}
{{- define "whalepod.egress" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "whalepod.releaseLabels" . | nindent 10 }}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- if not .Values.redis.enabled }}
- ports:
    {{- include "whalepod.externalRedisPorts" . | nindent 4 }}
{{- end }}
{{- with dig "tracing" "otlp_endpoint" "" .Values.settings }}
- ports:
    - port: {{ regexFind "[0-9]+$" . | default "4317" | int }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "role" "decode" "values" … "callers" (list …) "others" (list …)): a rank's policy. Ranks that share
     experts meet on ports that the system chooses. */}}
{{- define "whalepod.rankNetworkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "whalepod.fullname" .root }}-{{ .role }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "whalepod.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "whalepod.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress{{ if .root.Values.networkPolicy.restrictEgress }}, Egress{{ end }}]
  ingress:
    - from:
        {{- include "whalepod.peers" (dict "root" .root "roles" .callers) | nindent 8 }}
      ports:
        - port: {{ .values.port }}
        {{- if include "whalepod.servesDirect" . }}
        - port: {{ add .values.port 2000 }}
        {{- end }}
    - from:
        {{- include "whalepod.monitoringPeers" .root | nindent 8 }}
        {{- /* for their dashboard */}}
        {{- include "whalepod.peers" (dict "root" .root "roles" (list "router")) | nindent 8 }}
      ports:
        - port: {{ add .values.port 1000 }}
    {{- if include "whalepod.computesTogether" (dict "root" .root "pool" .role) }}
    - from:
        {{- include "whalepod.peers" (dict "root" .root "roles" (list .role)) | nindent 8 }}
    {{- end }}
    {{- if .root.Values.ray.enabled }}
    - from:
        {{- include "whalepod.peers" (dict "root" .root "roles" (list "ray-head" "prefill" "decode" "vision")) | nindent 8 }}
    {{- end }}
  {{- if .root.Values.networkPolicy.restrictEgress }}
  egress:
    {{- include "whalepod.egress" .root | nindent 4 }}
  {{- end }}
{{- end -}}

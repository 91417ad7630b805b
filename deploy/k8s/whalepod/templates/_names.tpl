{{- define "whalepod.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 43 | trimSuffix "-" -}}
{{- end -}}

{{/* 43 characters leave room for "-prefill-12345" in 63, and for a StatefulSet's revision in 63. */}}
{{- define "whalepod.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 43 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 43 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 43 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "pool" "decode"): not empty if its ranks need each other for a step. */}}
{{- define "whalepod.computesTogether" -}}
{{- if or (dig .pool "expert_parallel" false .root.Values.settings) (gt (int (dig .pool "context_parallel" 1 .root.Values.settings)) 1) -}}
true
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "role" "prefill"): not empty if its ranks serve blocks from their memory. */}}
{{- define "whalepod.servesDirect" -}}
{{- if and (eq .role "prefill") (dig "kv" "direct" (not .root.Values.peerTls.existingSecret) .root.Values.settings) -}}
true
{{- end -}}
{{- end -}}

{{/* Of every pod of this release, whatever its role. */}}
{{- define "whalepod.releaseLabels" -}}
app.kubernetes.io/name: {{ include "whalepod.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* (dict "root" $ "role" "decode"): what selects a workload's pods. */}}
{{- define "whalepod.selectorLabels" -}}
{{ include "whalepod.releaseLabels" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* (dict "root" $ "role" "decode"): what every object carries. */}}
{{- define "whalepod.labels" -}}
{{ include "whalepod.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: whalepod
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
whalepod.io/role: {{ .role }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "image" .Values.image "default" "tag") */}}
{{- define "whalepod.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .default .image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "whalepod.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "whalepod.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "whalepod.secretName" -}}
{{- default (printf "%s-cluster" (include "whalepod.fullname" .)) .Values.clusterSecret.existingSecret -}}
{{- end -}}

{{- define "whalepod.redisSecretName" -}}
{{- default (printf "%s-redis" (include "whalepod.fullname" .)) .Values.redis.auth.existingSecret -}}
{{- end -}}

{{- define "whalepod.configName" -}}
{{- printf "%s-config" (include "whalepod.fullname" .) -}}
{{- end -}}

{{/* (dict "root" $ "index" 0): the name by which a Redis of this chart is reached. */}}
{{- define "whalepod.redisHost" -}}
{{- $name := printf "%s-redis" (include "whalepod.fullname" .root) -}}
{{- printf "%s-%d.%s.%s.svc.%s" $name (int .index) $name .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}
